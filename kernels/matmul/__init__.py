"""y = x @ weight.T with row-exact bits: packing, the product, and the self-test that picks the recipe."""

from kernels.matmul.reference import NotRowExact, Packed, Recipe, choose_recipe, linear, pack, row_exact

__all__ = ["NotRowExact", "Packed", "Recipe", "choose_recipe", "linear", "pack", "row_exact"]
