"""A paged, quantised key-value cache."""

from __future__ import annotations

from pathlib import Path

import torch

import foscar.ops  # noqa: F401  (defines torch.ops.foscar)
from foscar._checks import may_wait, refuse, require, require_index, require_int, require_tensor
from foscar.layout import FORMAT_VERSION, CacheSpec, QuantSpec
from foscar.rotation import check_rotation, hadamard, rotate

MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class PagedKVCache:
    """One layer's keys and values: packed pages, and tokens that are kept exact, in the model's precision.

    Parameters
    ----------
    spec : CacheSpec
        Formats and shapes.
    num_pages : int
        Pages of 64 tokens to allocate.
    device : torch.device or str
        Where the cache lives.
    dtype : torch.dtype, optional
        dtype of the exact tokens: bfloat16, float16 or float32. By default they are allocated by the first append, in
        the dtype of its keys; give it if that append is captured in a CUDA graph. Without effect if
        ``spec.exact_tokens`` is 0.
    max_seqs : int
        Sequences that can be in the cache at a time, for specs that keep exact tokens: each owns a row of them, of
        2 x num_kv_heads x spec.exact_tokens x head_dim numbers.
    k_rotation, v_rotation : torch.Tensor, optional
        ``[head_dim, head_dim]``, orthogonal: R of foscar/rotation.py, the weight of an `nn.Linear` that rotates. New
        keys (after rotary embedding) or values are rotated by it before they are stored, exact ones included;
        attention rotates queries and turns outputs back by itself. Best in the dtype of k and v, or each call rounds
        it to that. None where the spec has a Hadamard transform, which is one.

    Attributes
    ----------
    recipe : str
        ``str(spec)``, which names the spec to the operators.
    pages : torch.Tensor
        uint8 ``[num_pages, num_kv_heads, spec.record_bytes]``, the packed tokens (docs/format.md).
    exact : torch.Tensor
        ``[max_seqs, num_kv_heads, 2, spec.exact_tokens, head_dim]``: for each sequence and head, keys, then values, of
        its sink tokens and of a ring of recent ones. ``[0, …]`` while it is not allocated.
    lengths : torch.Tensor
        int32 ``[max_seqs, 2]``: where each sequence's ring begins, and its tokens. To begin a sequence on pages that
        hold its first n tokens already (a shared prefix), write (n, n) into its row, after `copy_exact` if there are
        sinks; n is a multiple of 64 where K or V is channel-wise.
    k_rotation, v_rotation : torch.Tensor or None
        What keys and values are rotated by: the matrix given, or that of the Hadamard transform.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_pages: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        max_seqs: int = 64,
        k_rotation: torch.Tensor | None = None,
        v_rotation: torch.Tensor | None = None,
    ) -> None:
        require(isinstance(spec, CacheSpec), "spec", spec, "must be a foscar.CacheSpec")
        require_int("num_pages", num_pages, 1)
        require_int("max_seqs", max_seqs, 1)
        require(dtype is None or dtype in MODEL_DTYPES, "dtype", dtype, f"must be one of {list(MODEL_DTYPES)}")
        self.spec = spec
        self.recipe = str(spec)
        self.max_seqs = max_seqs
        self.pages = torch.zeros(num_pages, spec.num_kv_heads, spec.record_bytes, dtype=torch.uint8, device=device)
        rows = max_seqs if spec.exact_tokens else 0
        self.lengths = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        self.exact = self._new_exact(0 if dtype is None else rows, dtype or torch.bfloat16)
        self.k_rotation = self._rotation("k_rotation", k_rotation, spec.k, dtype)
        self.v_rotation = self._rotation("v_rotation", v_rotation, spec.v, dtype)
        self._named_sequences: bool | None = None

    def _rotation(
        self, name: str, matrix: torch.Tensor | None, quant: QuantSpec, dtype: torch.dtype | None
    ) -> torch.Tensor | None:
        if quant.hadamard:
            require(matrix is None, name, "a matrix", "must be None where the spec has a Hadamard transform")
            return hadamard(self.spec.head_dim).to(self.device, dtype or torch.bfloat16)
        if matrix is not None:
            check_rotation(name, matrix, self.spec.head_dim, self.device)
            matrix = matrix.detach().contiguous()
        return matrix

    def _new_exact(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        shape = (rows, self.spec.num_kv_heads, 2, self.spec.exact_tokens, self.spec.head_dim)
        with torch.inference_mode(False):  # it outlives the mode that the first append may be called in
            return torch.zeros(shape, dtype=dtype, device=self.device)

    @property
    def device(self) -> torch.device:
        """Where the cache lives."""
        return self.pages.device

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.pages.nbytes + self.exact.nbytes + self.lengths.nbytes

    def copy_pages(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy whole pages, int ``[n]`` ids each; `dst` must be distinct."""
        self.pages[dst.long()] = self.pages[src.long()]

    def save_pages(self, pages: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy whole pages to the host. Exact tokens are not part of pages.

        Parameters
        ----------
        pages : torch.Tensor
            int32 ``[n]``: ids, on the cache's device; not the -1 that tables are filled up with.
        out : torch.Tensor, optional
            Where to, uint8 ``[n, num_kv_heads, record_bytes]`` on the CPU, contiguous; by default a new tensor, pinned
            if the cache is on a GPU.

        Returns
        -------
        torch.Tensor
            `out`. If it is pinned, the copy runs on the current stream: wait for that before reading it.

        Raises
        ------
        ValueError
            If an argument does not fit; ids are looked at on a CPU only, or with ``FOSCAR_DEBUG=1``.
        """
        self._check_pages(pages)
        shape = (pages.shape[0], *self.pages.shape[1:])
        if out is None:
            out = torch.empty(shape, dtype=torch.uint8, pin_memory=self.pages.is_cuda)
        require_tensor("out", out, shape=shape, dtypes=(torch.uint8,), device=torch.device("cpu"))
        require(out.is_contiguous(), "out.stride()", out.stride(), "must be that of a contiguous tensor")
        return out.copy_(self.pages[pages.long()], non_blocking=True)

    def load_pages(self, records: torch.Tensor, pages: torch.Tensor) -> None:
        """Copy whole pages back from where `save_pages` put them, of this or another cache.

        That the other cache has an equal spec is not checked: records do not tell.

        Parameters
        ----------
        records : torch.Tensor
            uint8 ``[n, num_kv_heads, record_bytes]``, on the CPU or the cache's device. If it is pinned, the copy runs
            on the current stream: wait for that before writing to it.
        pages : torch.Tensor
            int32 ``[n]``: distinct ids to copy to, on the cache's device.

        Raises
        ------
        ValueError
            If an argument does not fit; ids are looked at on a CPU only, or with ``FOSCAR_DEBUG=1``. Nothing is written
            then.
        """
        self._check_pages(pages, distinct=True)
        shape = (pages.shape[0], *self.pages.shape[1:])
        device = self.device if isinstance(records, torch.Tensor) and records.is_cuda else torch.device("cpu")
        require_tensor("records", records, shape=shape, dtypes=(torch.uint8,), device=device)
        self.pages[pages.long()] = records.to(self.device, non_blocking=True)

    def _check_pages(self, pages: torch.Tensor, distinct: bool = False) -> None:
        require_index("pages", pages, ("n",), self.device)
        if self.pages.is_cuda and not may_wait():
            return
        ids = pages.tolist()
        for i, page in enumerate(ids):
            require(0 <= page < self.pages.shape[0], f"pages[{i}]", page, f"must be in [0, {self.pages.shape[0]})")
        require(not distinct or len(set(ids)) == len(ids), "pages", ids, "must be distinct")

    def save(self, path: str | Path) -> None:
        """Write everything to a safetensors file, with the spec and the version of the format in its metadata.

        Block tables are not part of a cache: keep those of its sequences, too. A `BlockManager` of the loaded cache
        would begin anew, with all pages free.
        """
        from safetensors.torch import save_file

        tensors = {"pages": self.pages, "exact": self.exact, "lengths": self.lengths}
        rotations = {"k_rotation": self.k_rotation, "v_rotation": self.v_rotation}
        tensors |= {name: matrix for name, matrix in rotations.items() if matrix is not None}
        metadata = {"foscar": str(FORMAT_VERSION), "spec": self.recipe, "max_seqs": str(self.max_seqs)}
        metadata["seq_ids"] = {None: "unknown", False: "default", True: "given"}[self._named_sequences]
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)

    @classmethod
    def load(cls, path: str | Path, spec: CacheSpec | None = None, device: torch.device | str = "cpu") -> PagedKVCache:
        """Read what `save` wrote.

        Parameters
        ----------
        path : str or Path
            The file.
        spec : CacheSpec, optional
            What it must hold.
        device : torch.device or str
            Where the cache is to live.

        Raises
        ------
        ValueError
            If it is no such file, of another version of the format, or of another spec.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt", str(device)) as file:
                metadata = file.metadata() or {}
                ours = "must be a file that PagedKVCache.save wrote"
                require("foscar" in metadata, "path", str(path), ours)
                rule = f"must be {FORMAT_VERSION}, the one that this version of foscar reads"
                require(metadata["foscar"] == str(FORMAT_VERSION), "format version", metadata["foscar"], rule)
                require({"spec", "max_seqs", "seq_ids"} <= metadata.keys(), "path", str(path), ours)
                rule = f"must be that of the file, {metadata['spec']}"
                require(spec is None or str(spec) == metadata["spec"], "spec", str(spec), rule)
                tensors = {name: file.get_tensor(name) for name in ("pages", "exact", "lengths")}
                held = {"k_rotation", "v_rotation"} & set(file.keys())
                rotations = {name: file.get_tensor(name) for name in held}
        except SafetensorError as error:
            raise ValueError(f"path={str(path)!r}: must be a safetensors file ({error})") from error
        cache = cls(CacheSpec.parse(metadata["spec"]), 1, device, max_seqs=int(metadata["max_seqs"]))
        rows, kept = cache.lengths.shape[0], tensors["exact"].shape[0]
        shapes = {
            "pages": (("num_pages", *cache.pages.shape[1:]), (torch.uint8,)),
            "exact": ((rows if kept else 0, *cache.exact.shape[1:]), MODEL_DTYPES),
            "lengths": ((rows, 2), (torch.int32,)),
        }
        for name, (shape, dtypes) in shapes.items():
            require_tensor(name, tensors[name], shape=shape, dtypes=dtypes, device=cache.device)
            setattr(cache, name, tensors[name])
        for name, matrix in rotations.items():
            check_rotation(name, matrix, cache.spec.head_dim, cache.device)
            setattr(cache, name, matrix)
        cache._named_sequences = {"default": False, "given": True}.get(metadata["seq_ids"])
        return cache

    def copy_exact(self, src: int, dst: int) -> None:
        """Copy one sequence's exact tokens, and their lengths, to another's row."""
        self.lengths[dst] = self.lengths[src]
        if self.exact.shape[0]:
            self.exact[dst] = self.exact[src]

    def __repr__(self) -> str:
        return f"PagedKVCache({self.spec}, num_pages={self.pages.shape[0]}, {self.nbytes:,} bytes on {self.device})"


def append(
    cache: PagedKVCache,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    seq_ids: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    is_neox: bool = True,
) -> None:
    """Append new tokens to the sequences of a batch. Nothing is differentiable.

    If the spec keeps exact tokens, new ones are kept so, and are quantised into their page when they leave the recent
    window. A sequence is truncated by appending at a smaller `seq_lens`, and begun anew by appending at 0. Where K or V
    is channel-wise, it cannot be truncated inside a quantised block: `recent_tokens` of at least the number of tokens
    that speculation may take back avoids that.

    Parameters
    ----------
    cache : PagedKVCache
        Changed in place.
    k, v : torch.Tensor
        ``[total_tokens, num_kv_heads, head_dim]``, bfloat16, float16 or float32 and finite, any strides: the new
        tokens of all sequences one after another. Keys are stored as given, that is, after rotary embedding, but for
        what `cos_sin_cache` does.
    block_table : torch.Tensor
        int32 ``[batch, max_pages]``: token p of sequence b belongs in page ``block_table[b, p // 64]``. Only columns of
        pages that are written are looked at: none for exact tokens.
    seq_lens : torch.Tensor
        int32 ``[batch]``: tokens of each sequence before the append. Without exact tokens the cache does not know
        them, and cannot notice a gap.
    cu_seqlens : torch.Tensor
        int32 ``[batch + 1]``: sequence b's new tokens are rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``.
    seq_ids : torch.Tensor, optional
        int32 ``[batch]``: the row of ``cache.exact`` that each sequence owns, from its first append to its end. By
        default 0, 1, … in batch order, which is right as long as the batch stays the same; it is refused once
        `seq_ids` has been given. Ignored if the spec keeps no exact tokens.
    cos_sin_cache : torch.Tensor, optional
        float32 ``[positions, rotary_dim]``, as SGLang and vLLM have it: row p holds the cosines, then the sines of
        position p's angles. If given, the first rotary_dim channels of new keys (a multiple of 16) are turned by them
        and rounded to the dtype of k; the query is for the caller to turn.
    is_neox : bool
        Which channels are turned together: i and i + rotary_dim / 2, or else 2 i and 2 i + 1.

    Raises
    ------
    ValueError
        If an argument does not fit, or a value: lengths, page ids, a position without a row of cos_sin_cache, or a k or
        v that is not finite. The cache is then as it was. The kernel for Hopper does not look at values, which would
        take waiting for the device, unless ``FOSCAR_DEBUG=1`` is set and no graph is being captured: it writes to no
        page outside of the cache, and leaves keys without a row of cos_sin_cache as they are. It refuses a batch of
        more than 65536, and to be captured in a CUDA graph before its first call outside of one.
    """
    require(isinstance(cache, PagedKVCache), "cache", type(cache).__name__, "must be a foscar.PagedKVCache")
    spec = cache.spec
    require_index("block_table", block_table, ("batch", "max_pages"), cache.device)
    batch = block_table.shape[0]
    require_index("seq_lens", seq_lens, (batch,), cache.device)
    require_index("cu_seqlens", cu_seqlens, (batch + 1,), cache.device)
    check_seq_ids(seq_ids, batch, cache)
    dtypes = (cache.exact.dtype,) if cache.exact.shape[0] else MODEL_DTYPES
    shape = ("total_tokens", spec.num_kv_heads, spec.head_dim)
    require_tensor("k", k, shape=shape, dtypes=dtypes, device=cache.device)
    require_tensor("v", v, shape=tuple(k.shape), dtypes=(k.dtype,), device=cache.device)
    if cos_sin_cache is not None:
        sizes = ("positions", "rotary_dim")
        require_tensor("cos_sin_cache", cos_sin_cache, shape=sizes, dtypes=(torch.float32,), device=cache.device)
        rotary_dim = cos_sin_cache.shape[1]
        rule = f"must be a multiple of 16, at most head_dim, {spec.head_dim}"
        require(rotary_dim % 16 == 0 and 0 < rotary_dim <= spec.head_dim, "rotary_dim", rotary_dim, rule)
    exact = cache.exact
    if spec.exact_tokens and not exact.shape[0]:
        if k.is_cuda and torch.cuda.is_current_stream_capturing():
            refuse("dtype", None, "must be given to a PagedKVCache that a CUDA graph appends to first")
        exact = cache._new_exact(cache.max_seqs, k.dtype)
    torch.ops.foscar.append(
        cache.pages,
        exact,
        cache.lengths,
        k,
        v,
        block_table,
        seq_lens,
        cu_seqlens,
        seq_ids,
        cos_sin_cache,
        is_neox,
        cache.k_rotation,
        cache.v_rotation,
        cache.recipe,
    )
    if spec.exact_tokens:
        cache.exact, cache._named_sequences = exact, seq_ids is not None


def dequantize(
    cache: PagedKVCache, block_table: torch.Tensor, seq_lens: torch.Tensor, *, seq_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values that attention sees.

    Parameters
    ----------
    cache : PagedKVCache
        The cache.
    block_table : torch.Tensor
        int32 ``[batch, max_pages]``, as in `append`.
    seq_lens : torch.Tensor
        int32 ``[batch]``: tokens to read of each sequence.
    seq_ids : torch.Tensor, optional
        int32 ``[batch]``, as in `append`.

    Returns
    -------
    k, v : torch.Tensor
        float32 ``[sum(seq_lens), num_kv_heads, head_dim]``: the tokens of all sequences one after another, as `append`
        takes them, rotated back.

    Raises
    ------
    ValueError
        If an argument does not fit.
    """
    require(isinstance(cache, PagedKVCache), "cache", type(cache).__name__, "must be a foscar.PagedKVCache")
    require_index("block_table", block_table, ("batch", "max_pages"), cache.device)
    require_index("seq_lens", seq_lens, (block_table.shape[0],), cache.device)
    check_seq_ids(seq_ids, block_table.shape[0], cache)
    k, v = torch.ops.foscar.dequantize(
        cache.pages, cache.exact, cache.lengths, block_table, seq_lens, seq_ids, cache.recipe
    )
    return rotate(k, cache.k_rotation, back=True), rotate(v, cache.v_rotation, back=True)


def check_seq_ids(seq_ids: torch.Tensor | None, batch: int, cache: PagedKVCache) -> None:
    """Check which exact tokens are meant, where there are any."""
    if not cache.spec.exact_tokens:
        return
    if seq_ids is not None:
        require_index("seq_ids", seq_ids, (batch,), cache.device)
    elif cache._named_sequences:
        refuse("seq_ids", None, "must be given, as it was when this cache was appended to")
    elif batch > cache.max_seqs:
        refuse("batch", batch, f"must not exceed the cache's max_seqs, {cache.max_seqs}")
