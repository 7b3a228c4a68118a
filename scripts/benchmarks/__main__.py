"""Benchmarks that compare gluon_mgpu with other programs: python scripts/benchmarks step."""

from commands import main

if __name__ == "__main__":
    main(prog_name="python scripts/benchmarks")
