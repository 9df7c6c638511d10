"""What torch.compile and activation checkpointing are told about FP8 ops."""
