"""`python -m heads_kernels report`: what the heads of a transformers model do on a text, as one page.

command   the options, and the run
inputs    the model and the text, loaded and checked
panels    what is measured for each panel of the page, and how it is shown

report.html.j2 is the page.
"""
