"""`python -m heads_kernels report`: what the heads of a transformers model do on a text, as one page.

command   the options, and the run with its progress and forecast
inputs    the model and the text, loaded and checked
stages    one function for each measurement; its result is plain data
results   the results as files, and as tables by layer
drawing   draws grids of heads, points by layer, curves, attention maps
pictures  what each section of the page shows and says
page      the HTML around the sections
"""
