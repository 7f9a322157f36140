"""The ServerApp, which runs on the server."""

from digits_federation.task import model, server_data
from fedkeep.flower import server_app

app = server_app(None, model, server_data)  # the method is set in pyproject.toml
