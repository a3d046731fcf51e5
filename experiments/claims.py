"""The claims of folders that `pdvi reproduce` wrote, as one page.

cd pdvi-reproduce && python ../experiments/claims.py quadratic mixture embryo > ../experiments/CLAIMS.md
"""

import sys
from pathlib import Path

from pdvi.reproduce.claims import collected

print(collected([Path(folder) for folder in sys.argv[1:]]))
