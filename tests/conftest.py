"""What every test shares: torchtitan readied for the CPU, and one thread for each process."""

import torch

from titan_fp8 import cpu_host

if not torch.cuda.is_available():
    # Before any test imports torchtitan, which asks for its device while it is imported.
    cpu_host.prepare()

# The tensors are small: two threads wait for each other longer than they compute.
torch.set_num_threads(1)
