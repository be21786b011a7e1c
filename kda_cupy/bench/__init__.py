# SPDX-License-Identifier: Apache-2.0
"""``kda-cupy bench``: judged first, then timed, then recorded; tables and pictures are made from the record."""
