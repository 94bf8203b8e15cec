"""The CPU's fast time loops, one file a family. The equations they compute stand in minigrad/layers."""
