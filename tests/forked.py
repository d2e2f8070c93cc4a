"""What the fixture forks imports last: its processes need the tests' modules, nobody looks at their pictures, and no
power is cut."""
import os

import helpers                                                         # noqa: F401
from conftest import leave_pictures_out

leave_pictures_out(setattr, lambda name: False)
os.fsync = os.fstat
