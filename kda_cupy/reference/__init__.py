# SPDX-License-Identifier: Apache-2.0
"""The operations in NumPy: ``truth`` in float64, a formula a line, to judge by; ``batched`` in float32, to run.

Neither imports anything of what it judges or stands in for, nor the other.
"""
