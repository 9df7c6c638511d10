"""Starts a script once for each GPU, and kills what has not finished in time."""

import os
import signal
import socket
import subprocess
import sys
import time


def launch(ranks: int, deadline_s: float, may_die: bool = False) -> int:
    """Runs this command again as `ranks` ranks; returns how many have failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
        "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "4",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", *sys.argv],
            env=os.environ | common | {"RANK": str(r), "LOCAL_RANK": str(r)},
        )
        for r in range(ranks)
    ]
    end = time.monotonic() + deadline_s
    while any(p.poll() is None for p in processes) and time.monotonic() < end:
        time.sleep(0.2)
        if not may_die and any(p.returncode for p in processes):
            time.sleep(8)  # The others may say why.
            break
    for rank, p in enumerate(processes):
        if p.poll() is None:
            print(f"rank {rank} has not finished: killed", flush=True)
            p.send_signal(signal.SIGKILL)
        p.wait()
    codes = [p.returncode for p in processes]
    print("exit codes", codes, flush=True)
    return sum(code != 0 for code in codes)


def start() -> tuple[int, int]:
    """Joins the process group: this rank and their number. Call it first."""
    import datetime
    import faulthandler

    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(float(os.environ.get("HANG_S", "200")), exit=True)
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        device_id=torch.device("cuda", rank),
        timeout=datetime.timedelta(seconds=90),
    )
    return rank, dist.get_world_size()
