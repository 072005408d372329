"""Curvature of a log density: the Gauss-Newton matrix of the likelihood by layer, plus the prior's precision."""

from credibly.curvature.blocks import Block, DenseBlock, DiagonalBlock, KronBlock, block_from_tensors
from credibly.curvature.gauss_newton import STRUCTURES, curvature_blocks
from credibly.curvature.layers import LayerPart
from credibly.curvature.output_fisher import fisher_root
from credibly.curvature.parts import Parts, RowPass, choose_names, find_parts
from credibly.curvature.prior_precision import prior_precision
from credibly.curvature.scores import FISHERS, Fisher

__all__ = [
    "FISHERS",
    "STRUCTURES",
    "Block",
    "DenseBlock",
    "DiagonalBlock",
    "Fisher",
    "KronBlock",
    "LayerPart",
    "Parts",
    "RowPass",
    "block_from_tensors",
    "choose_names",
    "curvature_blocks",
    "find_parts",
    "fisher_root",
    "prior_precision",
]
