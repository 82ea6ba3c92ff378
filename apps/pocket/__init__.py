"""The pocket model: data, training and evaluation of a small DeepSeek-V4 checkpoint.

Everything here is a program of the project, not a part of the installed package.
"""
