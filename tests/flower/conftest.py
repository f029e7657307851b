"""Nothing of a test leaves this machine or reaches the user's own Flower settings."""

import os
import tempfile

HOME = tempfile.TemporaryDirectory(prefix="mimicfl-flwr-")  # removed when the tests end
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_HOME"] = HOME.name
