# SPDX-License-Identifier: Apache-2.0
"""``kda-cupy check``: is this machine right? Every operation beside float64, output and state."""
