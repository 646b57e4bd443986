"""length_buckets, packing, sdpa and chunked_loss on a real small language model and its loader."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler, Subset, TensorDataset

from perftrain import PerftrainError, Trainer, opt
from perftrain.data.keyed import Keyed
from perftrain.data.lengths import LengthBuckets, lengths_of, padding_share
from perftrain.data.packing import Packed, first_fit, joined, length_of
from perftrain.engine.assemble import build_loader
from perftrain.engine.trainer import facts_of
from perftrain.facts import PHASES, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.chunked_loss import Logits, can_fuse, fused, recomputed
from perftrain.opt.seams import LoaderOptions, Plan, Workload, attention_layers, output_layer
from perftrain_recipes.gpt import GPT

VOCABULARY, WIDTH = 96, 16
PADDING = -100


class Texts(Dataset[tuple[Tensor, Tensor]]):
    """Sequences whose first token is their own number, so that a batch says which samples it holds."""

    def __init__(self, count: int = 90, longest: int = 40, seed: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = [int(n) for n in rng.integers(2, longest + 1, count)]
        self.samples = [torch.from_numpy(rng.integers(0, VOCABULARY, n + 1)) for n in self.lengths]
        for number, sample in enumerate(self.samples):
            sample[0] = number

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.samples[index][:-1], self.samples[index][1:]


def pad(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*samples, strict=True)
    return pad_sequence(inputs, batch_first=True), pad_sequence(targets, batch_first=True, padding_value=PADDING)


def loader(dataset: Any = None, batch_size: int = 8, **rest: Any) -> DataLoader[Any]:
    settings = {"shuffle": True, "collate_fn": pad, **rest}
    return DataLoader(Texts() if dataset is None else dataset, batch_size=batch_size, **settings)


def with_(switch: Switch, batches: DataLoader[Any]) -> Any:
    return build_loader(batches, [switch])[0]


def padding(batches: Any) -> float:
    real = total = 0
    for _, targets in batches:
        real += int((targets != PADDING).sum())
        total += targets.numel()
    return 1 - real / total


def loss_fn(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    return F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())


def gpt(tied: bool = False) -> GPT:
    torch.manual_seed(0)
    model = GPT(VOCABULARY, WIDTH, heads=2, layers=2, longest=64)
    if tied:
        model.head.weight = model.embedding.weight
    return model


def trainer(*switches: Switch, model: nn.Module | None = None, batches: Any = None, loss: Any = loss_fn, **rest: Any) -> Trainer:
    model = model or gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return Trainer(model, loss, optimizer, loader() if batches is None else batches, opt=switches, clip_norm=1.0, **rest)


def losses(*switches: Switch, steps: int = 12, **rest: Any) -> list[float]:
    made = trainer(*switches, **rest)
    torch.manual_seed(5)
    made.fit(steps=steps)
    return made.meter.losses()["loss"]


def facts(batches: Any, model: nn.Module | None = None) -> dict[str, Any]:
    model = model or gpt()
    return facts_of(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, loss_fn=loss_fn))


def numbers_in(batch: tuple[Tensor, Tensor]) -> list[int]:
    """The samples of an unpacked batch."""
    return batch[0][:, 0].tolist()


# --- lengths ---
def test_lengths_are_seen_through_wrappers() -> None:
    texts = Texts(10)
    assert lengths_of(texts) == texts.lengths
    assert lengths_of(Keyed(texts, 1)) == texts.lengths
    assert lengths_of(Subset(texts, [3, 1])) == [texts.lengths[3], texts.lengths[1]]
    assert lengths_of([texts[n] for n in range(10)]) == texts.lengths
    assert lengths_of([{"tokens": [1, 2, 3]}, {"tokens": [4]}]) == [3, 1]
    assert lengths_of([3, 4]) is None
    assert lengths_of(TensorDataset(torch.zeros(4, 3))) is None


def test_padding_share_is_what_an_epoch_holds() -> None:
    texts = Texts(400)
    before = torch.get_rng_state()
    share = padding_share(loader(texts))
    assert torch.equal(torch.get_rng_state(), before)
    assert share == pytest.approx(padding(loader(texts)), abs=0.04)
    assert padding_share(loader(texts, batch_size=1)) == 0
    assert padding_share(DataLoader(TensorDataset(torch.zeros(4, 3)))) == 0.0
    assert padding_share(loader(TensorDataset(torch.zeros(4, 3)))) is None
    assert padding_share([1, 2]) is None


# --- length_buckets ---
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("window", [2, 5, 1000])
def test_buckets_hold_every_sample_once(drop_last: bool, window: int) -> None:
    torch.manual_seed(1)
    batches = with_(opt.LengthBuckets(bucket_batches=window), loader(drop_last=drop_last))
    for _ in range(2):
        epoch = [numbers_in(batch) for batch in batches]
        assert len(epoch) == len(batches) == len(loader(drop_last=drop_last)) == (11 if drop_last else 12)
        assert max(Counter(itertools.chain(*epoch)).values()) == 1
        assert sum(map(len, epoch)) == (88 if drop_last else 90)
        assert sorted(map(len, epoch)) == [8] * 11 if drop_last else [2] + [8] * 11


def test_what_drop_last_leaves_out_is_not_always_the_longest() -> None:
    texts = Texts()
    left_out = []
    for seed in range(12):
        torch.manual_seed(seed)
        epoch = set(itertools.chain(*(numbers_in(batch) for batch in with_(opt.LengthBuckets(), loader(texts, drop_last=True)))))
        left_out += [texts.lengths[n] for n in set(range(90)) - epoch]
    assert len(left_out) == 24
    assert min(left_out) < 15
    assert max(left_out) > 25


def test_buckets_save_padding_and_more_with_a_larger_window() -> None:
    plain = padding(loader(Texts(400)))
    found = [padding(with_(opt.LengthBuckets(bucket_batches=w), loader(Texts(400)))) for w in (2, 50)]
    assert plain > found[0] > 3 * found[1]
    assert found[1] < 0.06 < 0.3 < plain


def test_buckets_follow_the_seed_and_differ_by_epoch() -> None:
    def epochs(generator: torch.Generator | None = None) -> list[list[list[int]]]:
        batches = with_(opt.LengthBuckets(), loader(generator=generator))
        return [[numbers_in(batch) for batch in batches] for _ in range(2)]

    torch.manual_seed(1)
    first = epochs()
    torch.manual_seed(1)
    assert epochs() == first
    assert first[0] != first[1]
    assert epochs() != first
    own = epochs(torch.Generator().manual_seed(7))
    assert epochs(torch.Generator().manual_seed(7)) == own
    before = torch.get_rng_state()
    epochs(torch.Generator().manual_seed(7))
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_of_an_epoch_are_not_sorted_by_length() -> None:
    torch.manual_seed(1)
    longest = [batch[0].shape[1] for batch in with_(opt.LengthBuckets(), loader(Texts(400)))]
    assert longest != sorted(longest)
    assert abs(np.corrcoef(longest, range(len(longest)))[0, 1]) < 0.5


def test_a_loader_in_order_stays_in_order() -> None:
    before = torch.get_rng_state()
    buckets = with_(opt.LengthBuckets(bucket_batches=2), loader(shuffle=False)).batch_sampler
    first = list(itertools.islice(buckets, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert set(itertools.chain(*first)) == set(range(16))
    assert list(itertools.islice(buckets, 2)) == first


def test_a_distributed_sampler_keeps_its_shard_and_is_told_the_epoch() -> None:
    texts = Texts(64)
    shards = []
    for rank in range(2):
        sampler = DistributedSampler(texts, num_replicas=2, rank=rank, seed=4)
        made = trainer(opt.LengthBuckets(), batches=loader(texts, shuffle=None, sampler=sampler))
        made.fit(steps=4)
        assert len(list(sampler)) == 32
        shards.append(set(sampler))
        made.fit(steps=1)
        assert sampler.epoch == 1
    assert not shards[0] & shards[1]
    assert len(shards[0] | shards[1]) == 64


@pytest.mark.parametrize("num_workers", [0, 2])
def test_buckets_compose_with_workers(num_workers: int) -> None:
    torch.manual_seed(1)
    found, _ = build_loader(loader(), [opt.LengthBuckets(), opt.Workers(num_workers=num_workers)])
    assert sorted(itertools.chain(*(numbers_in(batch) for batch in found))) == list(range(90))


def test_buckets_train_as_well() -> None:
    plain, bucketed = losses(steps=60), losses(opt.LengthBuckets(), steps=60)
    assert np.mean(bucketed[-10:]) == pytest.approx(np.mean(plain[-10:]), rel=0.05)
    assert np.mean(bucketed[-10:]) < np.mean(bucketed[:5])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Texts(8))


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        (lambda: loader([(torch.zeros(3), torch.zeros(3))] * 20), "samples of different length; all of list are 3"),
        (lambda: DataLoader(TensorDataset(torch.zeros(8, 3), torch.zeros(8)), batch_size=2), "does not pad"),
        (lambda: loader(TensorDataset(torch.zeros(8, 3), torch.zeros(8))), "TensorDataset does not say. Give the dataset an attribute"),
        (lambda: DataLoader(Stream(), batch_size=2, collate_fn=pad), "Stream has none"),
        (lambda: DataLoader(Texts(), batch_sampler=LengthBuckets(SequentialSampler(Texts()), Texts().lengths, 4, 2), collate_fn=pad),
         "has a batch_sampler"),
        (lambda: [pad([Texts()[0]])], "is no DataLoader"),
    ],
)  # fmt: skip
def test_buckets_refuse_what_they_cannot_sort(batches: Callable[[], Any], says: str) -> None:
    with pytest.raises(PerftrainError, match=says):
        trainer(opt.LengthBuckets(), batches=batches())


def test_buckets_know_where_they_are_of_no_use() -> None:
    switch = opt.LengthBuckets()
    assert not switch.unfit(facts(loader()))
    assert switch.unfit(facts(DataLoader(TensorDataset(torch.zeros(4, 3))))) == "0.0% of a batch is padding"
    assert "lengths" in switch.unfit(facts(loader(TensorDataset(torch.zeros(4, 3)))))
    assert not switch.unfit({})


# --- packing ---
def test_first_fit_leaves_little_room() -> None:
    lengths = [7, 2, 5, 3, 9, 1]
    rows = first_fit(lengths, 10)
    assert sorted(itertools.chain(*rows)) == list(range(6))
    assert rows == [[4, 5], [0, 3], [2, 1]]
    assert first_fit([12, 3], 10) == [[0], [1]]


def test_packed_batches_hold_the_same_samples_in_fewer_rows() -> None:
    texts = Texts(400)
    torch.manual_seed(1)
    plain = list(loader(texts))
    torch.manual_seed(1)
    packed = list(with_(opt.Packing(), loader(texts)))
    assert len(packed) == len(plain)
    for (inputs, targets), (packed_inputs, packed_targets) in zip(plain, packed, strict=True):
        assert packed_inputs.shape[0] < inputs.shape[0]
        assert packed_inputs.shape[1] == inputs.shape[1]
        real = [(int(a), int(b)) for a, b in zip(inputs.flatten(), targets.flatten(), strict=True) if b != PADDING]
        both = zip(packed_inputs.flatten(), packed_targets.flatten(), strict=True)
        assert sorted((int(a), int(b)) for a, b in both if b != PADDING) == sorted(real)
    assert padding(packed) < 0.25 < 0.4 < padding(plain)


def test_longer_rows_are_fewer_and_short_ones_split_nothing() -> None:
    texts = Texts(400)
    found = []
    for row_length in (1, 40, 64):
        torch.manual_seed(1)
        found.append(list(with_(opt.Packing(row_length=row_length), loader(texts))))
    rows = [sum(batch[0].shape[0] for batch in epoch) for epoch in found]
    assert rows[0] > rows[1] > rows[2]
    assert rows[0] == 400
    assert max(batch[0].shape[1] for batch in found[2]) <= 64


def test_targets_at_the_joints() -> None:
    shifted = joined([(torch.tensor([1, 2]), torch.tensor([2, 3])), (torch.tensor([1, 5]), torch.tensor([5, 6]))])
    assert shifted[0].tolist() == [1, 2, 1, 5]
    assert shifted[1].tolist() == [2, 3, 5, 6]  # each target belongs to its own text
    own = [{"input_ids": torch.tensor(t), "attention_mask": torch.ones(2), "labels": torch.tensor(t)} for t in ([1, 2], [3, 4])]
    whole = joined(own)
    assert list(whole) == ["input_ids", "attention_mask", "labels"]
    assert whole["labels"].tolist() == [1, 2, PADDING, 4]  # the model shifts: 2 would have to predict 3
    assert own[1]["labels"].tolist() == [3, 4]
    row = Packed(lambda rows: rows)([*own, {**own[0]}])
    assert [sample["labels"].tolist() for sample in row] == [[1, 2], [3, 4], [1, 2]]  # as long as the longest: one each


def test_a_joint_is_where_texts_begin_again() -> None:
    """A model that looks at one token only cannot see joints: then packing is a change of layout and nothing else."""
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))
    plain = losses(model=copy.deepcopy(model))
    assert losses(opt.Packing(), model=copy.deepcopy(model)) == pytest.approx(plain, rel=1e-4)


def test_packing_trains_and_composes_with_workers() -> None:
    found = losses(opt.Packing(), opt.Workers(num_workers=1), steps=40)
    assert np.mean(found[-5:]) < np.mean(found[:5])
    assert found == losses(opt.Packing(), steps=40)


def test_packing_and_buckets_exclude_each_other() -> None:
    with pytest.raises(PerftrainError, match="exclude each other"):
        trainer(opt.Packing(), opt.LengthBuckets())


@pytest.mark.parametrize(
    ("sample", "seen"),
    [
        ((torch.zeros(3), torch.tensor(1)), r"tuple with \[\(3,\), \(\)\]"),
        ((torch.zeros(3), torch.zeros(4)), r"\[\(3,\), \(4,\)\]"),
        ((torch.zeros(2, 3), torch.zeros(2, 3)), r"\(2, 3\)"),
        ({"tokens": torch.zeros(3), "text": "abc"}, r"dict with \[\(3,\), 'str'\]"),
        (torch.zeros(3), "Tensor with no parts"),
        ((torch.zeros(3),), r"\[\(3,\)\]"),
    ],
)
def test_packing_refuses_other_samples(sample: Any, seen: str) -> None:
    with pytest.raises(PerftrainError, match=f"it saw .*{seen}"):
        length_of(sample)


def test_packing_refuses_loaders_that_do_not_pad() -> None:
    with pytest.raises(PerftrainError, match="does not pad"):
        trainer(opt.Packing(), batches=DataLoader(TensorDataset(torch.zeros(4, 3), torch.zeros(4))))
    with pytest.raises(PerftrainError, match="whole batches"):
        trainer(opt.Packing(), batches=DataLoader(Texts(), batch_size=None))
    assert opt.Packing().unfit(facts(DataLoader(TensorDataset(torch.zeros(4, 3)))))
    assert not opt.Packing().unfit(facts(loader()))


# --- sdpa ---
def flags() -> tuple[bool, ...]:
    b = torch.backends.cuda
    return b.flash_sdp_enabled(), b.mem_efficient_sdp_enabled(), b.math_sdp_enabled(), b.cudnn_sdp_enabled()


@pytest.mark.parametrize(("backend", "kernel"), [("flash", "flash_attention"), ("math", "attention_math")])
def test_the_kernel_is_the_one_asked_for(backend: str, kernel: str) -> None:
    before = flags()
    made = trainer(opt.SDPA(backend=backend))
    assert flags() == before
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        made.fit(steps=2)
    kernels = {event.key for event in seen.key_averages() if "_scaled_dot_product" in event.key}
    assert kernels
    assert all(kernel in name for name in kernels)
    assert flags() == before


def test_no_switch_no_math() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        trainer().fit(steps=1)
    assert not any("attention_math" in event.key for event in seen.key_averages())


def test_flags_are_restored_after_an_error() -> None:
    def fails() -> None:
        with opt.SDPA(backend="math").process():
            seen.append(flags())
            raise ZeroDivisionError

    before, seen = flags(), list[tuple[bool, ...]]()
    with pytest.raises(ZeroDivisionError):
        fails()
    assert seen == [(False, False, True, False)]
    assert flags() == before


@pytest.mark.parametrize("backend", ["flash", "math"])
def test_kernels_agree(backend: str) -> None:
    assert losses(opt.SDPA(backend=backend)) == pytest.approx(losses(), rel=1e-3)


def test_sdpa_composes_with_amp_and_chunked_loss() -> None:
    found = losses(opt.SDPA(backend="math"), opt.AMP(), opt.ChunkedLoss(chunk_tokens=32))
    assert found == pytest.approx(losses(), rel=0.02)


def test_a_kernel_that_a_cpu_lacks() -> None:
    for backend in ("efficient", "cudnn"):
        assert "a CPU has flash and math" in opt.SDPA(backend=backend).unavailable(Plan())
        with pytest.raises(PerftrainError, match=f"not {backend}"):
            trainer(opt.SDPA(backend=backend))
    assert not opt.SDPA(backend="math").unavailable(Plan())


class Wide(nn.Module):
    """Asks for what no fused kernel offers (dropout on a CPU)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inner.embedding(tokens)[:, None]
        return self.inner.head(F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)[:, 0])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_kernel_that_cannot_is_an_error_with_its_reason() -> None:
    with pytest.raises(PerftrainError, match=r"The flash kernel cannot compute this model's attention .*Try another opt\.sdpa\.backend"):
        trainer(opt.SDPA(), model=Wide()).fit(steps=1)
    trainer(opt.SDPA(backend="math"), model=Wide()).fit(steps=1)


class WithHeads(nn.Module):
    """``nn.MultiheadAttention``, which calls the function only where it need not return its weights."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(VOCABULARY, WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head, self.need_weights = nn.Linear(WIDTH, VOCABULARY), need_weights

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.attention(x, x, x, need_weights=self.need_weights)[0])


def test_attention_is_told_by_the_source_and_by_the_first_step() -> None:
    assert attention_layers(gpt()) == 2
    assert attention_layers(WithHeads(True)) == 1
    assert attention_layers(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 3, enable_nested_tensor=False)) == 3
    assert attention_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == 0
    trainer(opt.SDPA(), model=WithHeads(False)).fit(steps=1)
    with pytest.raises(PerftrainError, match="the first step did not call it once"):
        trainer(opt.SDPA(), model=WithHeads(True)).fit(steps=1)


def test_sdpa_without_attention_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))
    assert opt.SDPA().unfit(facts(loader(), model)) == "the model never calls scaled_dot_product_attention"
    assert not opt.SDPA().unfit(facts(loader()))
    with pytest.raises(PerftrainError, match="Sequential never calls it"):
        trainer(opt.SDPA(), model=model)


# --- chunked_loss ---
def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def deferred(model: nn.Module, chunk_tokens: int = 7) -> nn.Module:
    return opt.ChunkedLoss(chunk_tokens=chunk_tokens).model(copy.deepcopy(model), Plan())


Loss = Callable[[Any, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "flatten": loss_fn,
    "view": lambda logits, t: F.cross_entropy(logits.view(-1, logits.size(-1)), t.view(-1)),
    "view -1": lambda logits, t: F.cross_entropy(logits.reshape(t.numel(), -1), t.reshape(-1)),
    "torch.flatten": lambda logits, t: F.cross_entropy(torch.flatten(logits, 0, 1), t.flatten()),
    "module": lambda logits, t: nn.CrossEntropyLoss()(logits.transpose(1, 2), t),
    "permute": lambda logits, t: F.cross_entropy(logits.permute(0, 2, 1), t),
    "shifted": lambda logits, t: F.cross_entropy(logits[:, :-1].flatten(0, 1), t[:, 1:].flatten()),
    "shifted ...": lambda logits, t: F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, VOCABULARY), t[..., 1:].reshape(-1)),
    "float": lambda logits, t: F.cross_entropy(logits.float().flatten(0, 1), t.flatten()),
    "sum": lambda logits, t: F.cross_entropy(logits.flatten(0, 1), t.flatten(), reduction="sum") / 100,
    "smoothed": lambda logits, t: F.cross_entropy(logits.flatten(0, 1), t.flatten(), label_smoothing=0.1),
    "weighted": lambda logits, t: F.cross_entropy(logits.flatten(0, 1), t.flatten(), weight=torch.linspace(0.5, 2, VOCABULARY)),
    "ignoring": lambda logits, t: F.cross_entropy(logits.flatten(0, 1), t.flatten().clamp(min=0), ignore_index=0),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_are_those_of_whole_logits(name: str, tied: bool) -> None:
    model = gpt(tied)
    inputs, targets = next(iter(loader()))
    chunked = deferred(model)
    assert type(chunked(inputs)) is Logits
    plain_loss, chunked_loss = LOSSES[name](model(inputs), targets), LOSSES[name](chunked(inputs), targets)
    assert chunked_loss.item() == pytest.approx(plain_loss.item(), rel=1e-5)
    plain, found = gradients(model, plain_loss), gradients(chunked, chunked_loss)
    assert plain.keys() == found.keys()
    for key, gradient in plain.items():
        assert torch.allclose(found[key], gradient, rtol=1e-4, atol=1e-6), key


@pytest.mark.parametrize("compute", [recomputed, fused])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_both_ways_of_computing_it(compute: Any, bias: bool, reduction: str) -> None:
    if compute is fused and not can_fuse(torch.zeros(1), 0.0):
        pytest.skip("this torch has no linear_cross_entropy")
    torch.manual_seed(0)
    head = nn.Linear(8, 50, bias=bias)
    hidden, target = torch.randn(33, 8, requires_grad=True), torch.randint(0, 50, (33,))
    target[::4] = PADDING
    leaves = [hidden, *head.parameters()]
    logits = Logits(hidden, head.weight, head.bias, 10)
    loss = compute(logits, target, reduction, ignore_index=PADDING, label_smoothing=0.0, weight=None)
    whole = F.cross_entropy(head(hidden), target, reduction=reduction)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-5)
    for ours, theirs in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(whole, leaves), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def peak_growth(forward_backward: Callable[[], None]) -> int:
    """The most bytes that tensors took beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        forward_backward()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("amp", [False, True])
def test_the_table_of_logits_never_exists(amp: bool) -> None:
    """With fused and (under autocast) recomputed chunks: less memory than the one table takes in the plain step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4000, 8), nn.Linear(8, 4000))
    inputs, targets = torch.randint(0, 4000, (8, 64)), torch.randint(0, 4000, (8, 64))
    table_bytes = targets.numel() * 4000 * (2 if amp else 4)

    def step(which: nn.Module) -> Callable[[], None]:
        def run() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = loss_fn(which(inputs), targets)
            loss.backward()

        return run

    assert peak_growth(step(model)) > 2 * table_bytes
    assert peak_growth(step(deferred(model, 32))) < 0.5 * table_bytes


@pytest.mark.parametrize("switches", [(), (opt.AMP(),), (opt.AMP(dtype="float16"),)])
@pytest.mark.parametrize("tied", [False, True])
def test_training_stays_the_same(switches: tuple[Switch, ...], tied: bool) -> None:
    plain = losses(*switches, model=gpt(tied))
    assert losses(opt.ChunkedLoss(chunk_tokens=32), *switches, model=gpt(tied)) == pytest.approx(plain, rel=0.003)


def test_a_custom_step_is_understood_too() -> None:
    def step(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        loss = nn.CrossEntropyLoss()(model(batch[0]).transpose(1, 2), batch[1])
        return {"loss": loss, "twice": 2 * loss}

    assert losses(opt.ChunkedLoss(), loss=None, step=step) == pytest.approx(losses(), rel=1e-3)


def test_evaluation_sees_real_logits() -> None:
    seen: list[Any] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            seen.append(model(torch.zeros(2, 3, dtype=torch.long)))
        return {"classes": float(seen[-1].argmax(-1).numel())}

    made = trainer(opt.ChunkedLoss(), evaluate=evaluate)
    made.fit(steps=3)
    assert made.record.metrics["classes"] == 6
    assert isinstance(seen[0], Tensor)
    assert seen[0].shape == (2, 3, VOCABULARY)
    made.model.train()
    with torch.no_grad():
        assert isinstance(made.model(torch.zeros(1, 2, dtype=torch.long)), Tensor)


def test_names_of_parameters_stay_and_a_copy_is_its_own() -> None:
    model = gpt()
    chunked = deferred(model)
    assert list(chunked.state_dict()) == list(model.state_dict())
    twin: Any = copy.deepcopy(chunked)
    assert twin.head.forward.head is twin.head


@pytest.mark.parametrize(
    ("loss", "seen"),
    [
        (lambda logits, t: F.mse_loss(logits, t), "mse_loss"),
        (lambda logits, t: F.cross_entropy(logits.flatten(0, 1) / 2, t.flatten()), "arithmetic"),
        (lambda logits, t: logits.log_softmax(-1).mean(), r"logits\.log_softmax"),
        (lambda logits, t: torch.log_softmax(logits, -1).mean(), "log_softmax"),
        (lambda logits, t: F.cross_entropy(logits.flatten(), t.flatten()), r"flatten\(0, -1\)"),
        (lambda logits, t: F.cross_entropy(logits, t), "cross_entropy of logits"),
        (lambda logits, t: F.cross_entropy(logits.flatten(0, 1), t.flatten(), reduction="none").mean(), "reduction='none'"),
        (lambda logits, t: F.cross_entropy(logits[:, -1], t[:, -1]), r"logits\[\(slice"),
        (lambda logits, t: F.cross_entropy(logits.view(-1, 2), t.flatten()), r"view\(-1, 2\)"),
        (lambda logits, t: F.cross_entropy(logits.flatten(0, 1), F.one_hot(t.flatten() % 9, VOCABULARY).float()), "torch.float32"),
        (lambda logits, t: t.float().mean() * logits, "arithmetic|mul"),
    ],
)
def test_other_uses_of_the_logits_are_refused_by_name(loss: Loss, seen: str) -> None:
    with pytest.raises(PerftrainError, match=rf"this program used .*({seen}).*Leave the switch out"):
        trainer(opt.ChunkedLoss(), loss=loss).fit(steps=1)


class Around(nn.Module):
    """Computes its logits without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.embedding(tokens), self.head.weight)


def test_a_switch_that_acts_on_nothing_says_so() -> None:
    with pytest.raises(PerftrainError, match="the first step did not call it"):
        trainer(opt.ChunkedLoss(), model=Around()).fit(steps=1)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 4))
    assert opt.ChunkedLoss().unfit(facts(loader(), model))
    with pytest.raises(PerftrainError, match="Sequential does not"):
        trainer(opt.ChunkedLoss(), model=model)


def test_the_output_layer_is_the_last_and_widening_one() -> None:
    model = gpt()
    assert output_layer(model) is model.head
    assert output_layer(nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 10))) is None
    assert output_layer(nn.Sequential(nn.ReLU())) is None
    assert facts(loader())["vocabulary"] == VOCABULARY


@pytest.mark.slow
def test_chunked_loss_under_compile() -> None:
    plain = losses(steps=4)
    assert losses(opt.ChunkedLoss(chunk_tokens=32), opt.Compile(dynamic=True), steps=4) == pytest.approx(plain, rel=1e-3)


@pytest.mark.slow
def test_sdpa_under_compile() -> None:
    assert losses(opt.SDPA(backend="math"), opt.Compile(dynamic=True), steps=4) == pytest.approx(losses(steps=4), rel=1e-3)


# --- mistakes and promises ---
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: opt.LengthBuckets(bucket_batches=1), r"length_buckets\.bucket_batches is a whole number, 2 or more; it was 1\. Try opt\."),
        (lambda: opt.LengthBuckets(bucket_batches=2.5), r"it was 2\.5"),
        (lambda: opt.Packing(row_length=0), r"packing\.row_length is a whole number above 0 or null; it was 0\. Try opt\."),
        (lambda: opt.SDPA(backend="fast"), r"sdpa\.backend is one of flash, efficient, math, cudnn; it was 'fast'\. Try opt\."),
        (lambda: opt.ChunkedLoss(chunk_tokens=-1), r"chunked_loss\.chunk_tokens is a whole number above 0; it was -1\. Try opt\."),
    ],
)
def test_bad_values_are_refused(make: Callable[[], Switch], says: str) -> None:
    with pytest.raises(PerftrainError, match=says):
        make()


@pytest.mark.parametrize("switch", [opt.LengthBuckets(), opt.Packing(), opt.SDPA(), opt.ChunkedLoss()])
def test_promises_follow_the_share_of_arithmetic(switch: Switch) -> None:
    def step(share: float) -> StepBreakdown:
        return StepBreakdown({p: {"forward": share, "data_wait": 1 - share}.get(p, 0.0) for p in PHASES}, 10, 80)

    assert switch.predict(step(0.0)).high == pytest.approx(1.0)
    assert 1 < switch.predict(step(0.5)).high <= 2
    assert switch.predict(step(1.0)).high <= 4


def test_places() -> None:
    assert opt.LengthBuckets.card.place is opt.Packing.card.place is Place.LOADER
    assert opt.SDPA.card.place is Place.PROCESS
    assert opt.ChunkedLoss.card.place is Place.EDIT
    assert LoaderOptions.of(with_(opt.LengthBuckets(), loader())).batch_sampler is not None
