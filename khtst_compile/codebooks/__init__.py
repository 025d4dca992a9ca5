"""Codebooks in a captured graph: found by its structure, tabulated by running its own nodes, watched during calibration."""
