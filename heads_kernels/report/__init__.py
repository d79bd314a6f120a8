"""`python -m heads_kernels report`: what the heads of a transformers model do, read into one folder.

options   the command line
reading   the model and the text that it reads, loaded and checked
stages    one function for each reading; what it finds is plain data
folder    whole files, and which of them hold for this model and text
drawing   how pictures look
pictures  the readings drawn, from their files alone
maps      the attention maps of a sentence drawn
findings  what the numbers say, in words
page      index.html around them
command   all of it in turn, with a progress bar
"""
