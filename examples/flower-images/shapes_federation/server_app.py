"""What runs on the server."""

from shapes_federation.task import Net, server_data

from fedkeep.flower import server_app

app = server_app(None, Net, server_data)  # the method is the config's
