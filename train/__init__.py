"""Training of draft heads on a frozen base: a torchrun + DeepSpeed job that is described by one recipe file."""
