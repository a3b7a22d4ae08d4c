"""Horovod's questions about how it was built, which scripts ask before they choose. Here: gloo's answers."""

from __future__ import annotations


def gloo_built() -> bool:
    return True


def gloo_enabled() -> bool:
    return True


def mpi_built() -> bool:
    return False


def mpi_enabled() -> bool:
    return False


def mpi_threads_supported() -> bool:
    """Return False: operations of this API do not go through MPI. mpi4py can be used beside it."""
    return False


def nccl_built() -> int:
    return 0


def cuda_built() -> bool:
    return False


def rocm_built() -> bool:
    return False


def ddl_built() -> bool:
    return False


def ccl_built() -> bool:
    return False
