"""The passes of gramfx, one a file. Imported as ``gramfx.passes`` only."""

if __name__ != "gramfx.passes":
    raise ImportError(f"import this package as 'gramfx.passes', not as {__name__!r}")
