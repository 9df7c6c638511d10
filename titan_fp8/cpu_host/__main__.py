"""`python -m titan_fp8.cpu_host`."""

from titan_fp8.cpu_host import main

if __name__ == "__main__":
    main()
