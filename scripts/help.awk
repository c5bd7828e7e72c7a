# Lists the documented targets of a Makefile in their groups.
BEGIN { FS = ":.*## "; print "make TARGET" }
/^##@ / { printf "\n%s\n", substr($0, 5) }
/^[a-z-]+:.*## / { printf "  %-8s %s\n", $1, $2 }
