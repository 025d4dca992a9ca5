"""The KHTST systems in PyTorch: the models the compiler calls home, each trained by an example and compiled like any other.

`gsq`: Stiefel codebooks; `moe`: mixtures of experts; `jepa`: joint-embedding predictors; `ssm`: the replayed state space model.
"""
