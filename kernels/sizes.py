"""Numbers that the kernels and the planner share. Imports nothing: the planner runs without torch."""

#: Rows of the whole weight, evenly spread, whose largest logit is a token's row shift. Any valid rows do.
SAMPLED_ROWS = 64

#: The scaled-exp GEMM's tile statistics are of so many columns; row_prologue marks the half tiles, of so many
#: tokens, that hold a label.
TILE_COLUMNS = 256
HALF_TILE_ROWS = 64
