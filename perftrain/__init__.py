"""A PyTorch training loop in which every speed optimization is a switch with an honest verdict."""
