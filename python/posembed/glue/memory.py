"""The memory of large CPU results, which posembed caches for reuse, and of tables."""

import torch
from torch import Tensor

from posembed.glue.validation import whole


def empty_cache() -> int:
    """Releases the cached memory, as `torch.cuda.empty_cache` does on a device.

    Results in use are not affected.

    Returns:
        Number of bytes released.

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
        table: A tensor of any shape and dtype. Call this before the first value is written;
            otherwise the system moves its pages later, in the background. Nothing happens below
            4 MiB, on other devices, without transparent huge pages (Linux has them if
            `/sys/kernel/mm/transparent_hugepage/enabled` says `madvise` or `always`), or if the
            environment variable `POSEMBED_HUGE_PAGES` is 0.

    Examples:
        >>> import posembed as pe, torch
        >>> table = torch.empty(50257, 768)
        >>> pe.prefer_huge_pages(table)
        >>> token = pe.TokenEmbedding.from_pretrained(table.normal_(), freeze=False)
    """
    if type(table) in (Tensor, torch.nn.Parameter):  # subclasses do not own memory
        torch.ops.posembed.prefer_huge_pages.default(table)


def set_cache_limit(bytes: int) -> int:
    """Sets how many bytes posembed may cache in this process; 0 disables the cache.

    A large CPU result needs new memory, and its page faults cost more than the arithmetic that
    fills it. posembed therefore caches the memory of freed results of 4 MiB or more for reuse. It
    caches only memory that came fresh from the system, so it does not interfere with allocators
    that reuse memory themselves (jemalloc, tcmalloc).

    Args:
        bytes: The limit. The default is the environment variable `POSEMBED_CACHE_LIMIT`; without
            it, 1/64 of the memory that the process may use, at most 512 MiB, and 0 in a forked
            process. A limit that was set applies in forked processes too.

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
    return torch.ops.posembed.set_cache_limit.default(whole("bytes", bytes))  # type: ignore[no-any-return]
