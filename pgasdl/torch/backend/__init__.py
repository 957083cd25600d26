"""torch.distributed's backend "pgasdl"."""
