"""The cuts: each module takes the plain model and a process group and gives back the cut model."""
