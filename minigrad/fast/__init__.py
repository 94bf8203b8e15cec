"""The fast time loops, one file per family; their equations are in minigrad/layers."""
