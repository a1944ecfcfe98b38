import torch
def paged_attention(q, key_cache, value_cache, block_table, lengths, *, query_offsets=None, scale=None, window=None, invariant=False):
    out = []
    page = key_cache.shape[1]
    offs = query_offsets.tolist()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for r, n in enumerate(lengths.tolist()):
        a, b = offs[r], offs[r+1]
        pages = block_table[r, : -(-n // page)].long()
        k = key_cache[pages].flatten(0, 1)[:n]
        v = value_cache[pages].flatten(0, 1)[:n]
        g = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
        s = torch.einsum("qhd,khd->hqk", q[a:b].float(), k.float()) * scale
        pos = torch.arange(n - (b - a), n)
        mask = torch.arange(n)[None] <= pos[:, None]
        if window: mask &= torch.arange(n)[None] > pos[:, None] - window
        p = s.masked_fill(~mask, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", p, v.float()).to(q.dtype))
    return torch.cat(out)
