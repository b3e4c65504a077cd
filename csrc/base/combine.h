/* Expressions that combine two numbers, for our reductions and for plans that add: for any type that C has. */
#ifndef JAXMPI_COMBINE_H
#define JAXMPI_COMBINE_H

#define ADD(a, b)      ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))

/* A NaN on either side wins, as in numpy.maximum and numpy.minimum. */
#define LARGER(a, b)  ((a) > (b) || (a) != (a) ? (a) : (b))
#define SMALLER(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))

#endif
