"""Memory of large CPU results, which posembed keeps for reuse, and of tables."""

import torch
from torch import Tensor


def empty_cache() -> int:
    """Releases the kept memory, as `torch.cuda.empty_cache` does on a device.

    Results in use are not affected.

    Returns:
        The number of released bytes.

    Examples:
        >>> import posembed as pe
        >>> released = pe.empty_cache()
        >>> pe.empty_cache()
        0
    """
    return torch.ops.posembed.empty_cache.default()  # type: ignore[no-any-return]


def prefer_huge_pages(table: Tensor) -> None:
    """Asks the system to keep a CPU tensor in huge pages.

    Huge pages speed up reads of random rows. posembed uses them for its modules' tables, tables
    read from files, and results.

    Args:
        table: Of any shape and dtype. Call this before the first value is written; otherwise the
            system moves its pages later, in the background. Nothing happens below 4 MiB, on other
            devices, without transparent huge pages (Linux has them if
            `/sys/kernel/mm/transparent_hugepage/enabled` says `madvise` or `always`), and if the
            environment variable `POSEMBED_HUGE_PAGES` is 0.

    Examples:
        >>> import posembed as pe, torch
        >>> table = torch.empty(50257, 768)
        >>> pe.prefer_huge_pages(table)
        >>> token = pe.TokenEmbedding.from_pretrained(table.normal_(), freeze=False)
    """
    if type(table) in (Tensor, torch.nn.Parameter):  # subclasses have no memory of their own
        torch.ops.posembed.prefer_huge_pages.default(table)


def set_cache_limit(bytes: int) -> int:
    """Sets how many bytes posembed may keep in this process; 0 keeps none.

    A large result on the CPU is new memory, and its first touch costs more than the arithmetic that
    fills it. posembed therefore keeps the memory of freed results of 4 MiB and more for reuse. It
    keeps only memory that came fresh from the system, so it does not interfere with allocators that
    reuse memory themselves (jemalloc, tcmalloc).

    Args:
        bytes: The limit. Without this call it is the value of the environment variable
            `POSEMBED_CACHE_LIMIT`; without that a 64th of the memory that the process may use, at
            most 512 MiB, and nothing in a forked process. A limit that was set holds there too.

    Returns:
        The previous limit.

    Raises:
        ValueError: `bytes` is negative.

    Examples:
        >>> import posembed as pe
        >>> before = pe.set_cache_limit(1 << 30)
        >>> pe.set_cache_limit(before) == 1 << 30
        True
    """
    return torch.ops.posembed.set_cache_limit.default(bytes)  # type: ignore[no-any-return]
