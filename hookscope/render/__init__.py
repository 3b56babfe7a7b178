"""Values to pixels: colour tables, grids, heat maps, overlays, plots. Nothing here opens a user's file."""
