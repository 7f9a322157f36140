"""Settings of the documentation site for Sphinx; build_site.py writes its pages."""

from fedkeep import __version__

project = "fedkeep"
author = project_copyright = "The fedkeep authors"
version = release = __version__
extensions = ["myst_parser"]
myst_heading_anchors = 6  # links to headings work as on a code host
smartquotes = False  # -- and quotes stay as they are written
highlight_language = "none"
suppress_warnings = ["misc.highlighting_failure"]  # shortened code is shown without colours
html_theme = "furo"
html_title = "fedkeep"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
