# SPDX-License-Identifier: Apache-2.0
"""The operations: one file each, which checks the operands, chooses a kernel and launches it."""
