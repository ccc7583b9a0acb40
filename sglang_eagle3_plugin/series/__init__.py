"""Source patches: the same corrections as the runtime patches, as `git format-patch` series for each SGLang release.

`changes/` holds every correction once, as a structural edit of a release's own files; `export` runs them on a release and writes
`patches/<release>/`; `catalog` reads what was written; `transaction` applies it to a tree, all or nothing, and takes it back.
Paths are upstream's (``python/sglang/srt/...``): `git am` takes them in a checkout, `patch -p2` beside an installed ``sglang``.
"""
