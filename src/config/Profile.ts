// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The configuration that is used when there is no file: a complete server for trials, under names
 * that are reserved for testing (RFC 2606 section 2), which answers on this machine only. Pure.
 */

/** What stands for the file name in messages. */
export const name = "built-in profile"

export const text = `# Pepsi without a configuration file.
#
# Mail for NAME@pepsi.test lands in $PEPSI_HOME/mail/NAME/new/; NAME is letters, digits and ._-
# To change something, put the output of "pepsi config show" into a file and name it with -c.

[pepsi]
HOSTNAME = mail.pepsi.test
# The host itself is a domain as well: mail for dave@mail.pepsi.test is ours.
DOMAINS = pepsi.test mail.pepsi.test
USERS = any
STATE_DIR = $PEPSI_HOME

[pepsi-ingress]
ADDRESS = 127.0.0.1
PORT = 2525
STAGE = init

[stage-init]
PROGRAM = arc
NEXT = route
MODE = verify+seal

[stage-route]
PROGRAM = if
MODE = recipient
WHEN_1 = is_local(rcpt) => local
# SMTP accepts mail for our domains only, so what comes here was put into the queue by SQL for a
# foreign address. There is no relay in this profile, and the queue must drain.
ELSE = discard

[stage-local]
PROGRAM = local
MAILDIR = $PEPSI_HOME/mail/{mailbox}

[stage-discard]
PROGRAM = discard
`
