"""Decides which strategy a head runs, and in which chunks. Imports neither torch nor triton.

:mod:`.chunks` cuts the tokens, :mod:`.memory` predicts bytes, :mod:`.choose` predicts times and takes the
fastest plan that fits.
"""
