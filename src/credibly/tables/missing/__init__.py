"""Missing cells: imputation, training with gaps, predictions as mixtures over completions."""
