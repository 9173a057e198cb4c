"""The CUDA backend: kernels are compiled at first use by NVRTC, cached on disk, and launched on torch's stream.

Importing it loads nothing of CUDA.
"""
