"""The ServerApp, which runs on the server."""

from fedkeep.flower import server_app
from shapes_federation.task import Net, server_data

app = server_app(None, Net, server_data)  # the method is set in pyproject.toml
