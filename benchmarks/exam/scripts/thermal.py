# Twofold super-resolution of thermal camera frames: pixel loss + loss in feature space.
import os
import time
import torch
import torch.nn as nn
import torch.nn.functional as F

FIX = os.environ.get("FIX") == "1"


class FeatureSpace(nn.Module):
    """Describes an image by activations at three depths. Weights are given, not learned."""

    def __init__(self, seed=41):
        super().__init__()
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        self.stages = nn.ModuleList([
            nn.Sequential(nn.Conv2d(1, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 48, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(48, 96, 3, padding=1), nn.ReLU(), nn.Conv2d(96, 96, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(96, 192, 3, padding=1), nn.ReLU(), nn.Conv2d(192, 192, 3, padding=1), nn.ReLU()),
        ])
        torch.set_rng_state(state)

    def forward(self, img):
        out = []
        for stage in self.stages:
            img = stage(img)
            out.append(img)
        return out


class Upscaler(nn.Module):
    def __init__(self, width=32, depth=4):
        super().__init__()
        self.first = nn.Conv2d(1, width, 5, padding=2)
        self.body = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(depth)])
        self.last = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, small):
        h = F.relu(self.first(small))
        for conv in self.body:
            h = h + F.relu(conv(h))
        return F.interpolate(small, scale_factor=2.0, mode="bilinear") + F.pixel_shuffle(self.last(h), 2)


class ThermalModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = Upscaler()
        self.features = FeatureSpace().eval()
        if FIX:
            self.features.requires_grad_(False)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.generator.parameters(), lr=4e-4, betas=(0.9, 0.99), fused=True)
        return opt, torch.optim.lr_scheduler.StepLR(opt, 100, 0.7)

    def training_step(self, batch):
        guess = self.generator(batch["small"])
        pixel = F.l1_loss(guess, batch["large"])
        real = self.features(batch["large"])
        fake = self.features(guess)
        style = sum(F.mse_loss(a, b) for a, b in zip(fake, real))
        return {"loss": pixel + 0.2 * style, "pixel": pixel.detach()}


class Frames:
    def __init__(self, n=600, side=64, seed=23):
        self.g = torch.Generator().manual_seed(seed)
        blobs = F.interpolate(torch.randn(n, 1, 7, 7, generator=self.g), size=side, mode="bicubic")
        edges = (F.interpolate(torch.randn(n, 1, 12, 12, generator=self.g), size=side) > 0.8).float()
        self.large = (blobs + edges).contiguous(memory_format=torch.channels_last)
        self.small = F.avg_pool2d(self.large, 2)

    def batch(self, k):
        i = torch.randint(0, len(self.large), (k,), generator=self.g)
        return {"small": self.small[i].contiguous(memory_format=torch.channels_last),
                "large": self.large[i].contiguous(memory_format=torch.channels_last)}


def fit(module, frames, steps, size=8, warm=8):
    opt, sched = module.configure_optimizers()
    shown = 0.0
    for k in range(1, steps + 1):
        batch = frames.batch(size)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module.training_step(batch)
        opt.zero_grad(set_to_none=True)
        out["loss"].backward()
        opt.step()
        sched.step()
        shown += out["pixel"].item()
        if k == warm:
            begin = time.perf_counter()
        if k % 30 == 0:
            print(f"{k:4d}: L1 {shown / 30:.4f}", flush=True)
            shown = 0.0
    return size * (steps - warm) / (time.perf_counter() - begin)


if __name__ == "__main__":
    torch.manual_seed(6)
    module = ThermalModule().to(memory_format=torch.channels_last)
    rate = fit(module, Frames(), int(os.environ.get("STEPS", 240)))
    print(f"RATE {rate:.3f}")
