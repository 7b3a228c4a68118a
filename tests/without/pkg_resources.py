import left_out

left_out.load(__name__)
