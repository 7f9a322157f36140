"""What runs on the nodes."""

from shapes_federation.task import Net, node_data

from fedkeep.flower import client_app

app = client_app(None, Net, node_data)  # the method is the config's
