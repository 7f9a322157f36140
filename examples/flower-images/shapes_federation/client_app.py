"""The ClientApp, which runs on the nodes."""

from fedkeep.flower import client_app
from shapes_federation.task import Net, node_data

app = client_app(None, Net, node_data)  # the method is set in pyproject.toml
