#!/bin/sh
# A remote shell between two guests, as launchers of MPI ask for one, through $MAILBOX, a folder
# that both can write.
#   far.sh serve               runs what is asked for, until there is $MAILBOX/end
#   far.sh [-OPTION...] HOST COMMAND...    has a command run there, as ssh would
if [ "$1" = serve ]; then
  until [ -e "$MAILBOX/end" ]; do
    for call in "$MAILBOX"/call-*; do
      [ -e "$call" ] || continue
      number=${call##*-}
      mv "$call" "$MAILBOX/taken-$number"
      {
        sh "$MAILBOX/taken-$number" < /dev/null
        echo $? > "$MAILBOX/unread-$number"
        mv "$MAILBOX/unread-$number" "$MAILBOX/status-$number"
      } &
    done
    sleep 0.05
  done
  exit
fi
while [ "${1#-}" != "$1" ]; do shift; done
shift
echo "$*" > "$MAILBOX/unread-$$"
mv "$MAILBOX/unread-$$" "$MAILBOX/call-$$"
until [ -e "$MAILBOX/status-$$" ]; do sleep 0.05; done
exit "$(cat "$MAILBOX/status-$$")"
