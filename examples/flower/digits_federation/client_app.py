"""The ClientApp, which runs on the nodes."""

from digits_federation.task import model, node_data
from fedkeep.flower import client_app

app = client_app(None, model, node_data)  # the method is set in pyproject.toml
