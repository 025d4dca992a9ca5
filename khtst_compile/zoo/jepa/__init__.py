"""Joint-embedding predictors: the embedding of what is hidden, predicted from what is seen (LeCun, 2022)."""
