"""The matrix: how each class is served in each release, with the evidence, and the pages that show it."""
