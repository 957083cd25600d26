"""A model and its optimizer in a training loop: what :func:`pgasdl.torch.attach` makes of them."""
