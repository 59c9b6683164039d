// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Handing a message to one server by SMTP, on nodemailer's connection: it normalises line ends and
 * adds dots (RFC 5321 section 4.5.2), forgets what it learned before TLS (RFC 3207 section 4.2).
 */
import SMTPConnection from "nodemailer/lib/smtp-connection"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Address from "../src/mail/Address.ts"
import * as Ip from "../src/mail/Ip.ts"
import type { Status } from "../src/mail/Status.ts"
import { Transport, TransportError } from "../src/services/Transport.ts"
import type { Handed, Outgoing } from "../src/services/Transport.ts"

export interface Settings {
  readonly host: string
  readonly port: number
  /** The name we give with EHLO. */
  readonly hostname: string
  /** For connecting, and for each reply. */
  readonly timeout: Duration.Duration
}

export const TransportSmtp = (settings: Settings): Layer.Layer<Transport> =>
  Layer.succeed(
    Transport,
    Transport.of({
      submit: Effect.fnUntraced(function* (outgoing) {
        const connection = yield* open(settings)
        yield* refuseUnsendable(connection, outgoing)
        const handed = yield* send(connection, outgoing)
        connection.quit()
        return handed
      }, Effect.scoped)
    })
  )

/** What nodemailer adds to its errors. */
interface SmtpError extends Error {
  readonly response?: string | undefined
  readonly responseCode?: number | undefined
  readonly code?: string | undefined
}

const open = (settings: Settings) =>
  Effect.acquireRelease(
    Effect.sync(() => new SMTPConnection(options(settings))),
    (connection) => Effect.sync(() => connection.close())
  ).pipe(
    Effect.tap((connection) =>
      Effect.callback<void, TransportError>((resume) => {
        const failed = (cause: SmtpError): void =>
          resume(
            Effect.fail(failure(`connection to ${settings.host} port ${settings.port}`, cause))
          )
        // Errors after the connection stands also reach the callback of what was going on then.
        connection.on("error", failed)
        connection.connect((cause) => (cause ? failed(cause) : resume(Effect.void)))
      })
    )
  )

const options = (settings: Settings): SMTPConnection.Options => {
  const millis = Duration.toMillis(settings.timeout)
  return {
    host: settings.host,
    port: settings.port,
    name: settings.hostname,
    secure: false,
    logger: false,
    connectionTimeout: millis,
    greetingTimeout: millis,
    socketTimeout: millis,
    dnsTimeout: millis,
    // On this host nobody is between us and the server, and its certificate is its own.
    tls: { rejectUnauthorized: !isHere(settings.host) }
  }
}

const isHere = (host: string): boolean => {
  const octets = Ip.parse(host)
  return host === "localhost" || (octets !== undefined && Ip.isLoopback(octets))
}

const refuseUnsendable = (
  connection: SMTPConnection,
  { recipients, sender }: Outgoing
): Effect.Effect<void, TransportError> => {
  // RFC 6531 section 3.1: such an address is not sent to a server that did not offer SMTPUTF8.
  const needsUtf8 = [sender, ...recipients].some((address) => !Address.isAscii(address))
  if (!needsUtf8 || offers(connection, "SMTPUTF8")) return Effect.void
  const cause = new Error("the server does not take addresses beyond ASCII")
  return Effect.fail(new TransportError({ status: "5.6.7", operation: "MAIL", cause }))
}

/** What EHLO has listed; the library keeps it to itself, so the types have no name for it. */
const offers = (connection: SMTPConnection, extension: string): boolean =>
  (
    connection as unknown as { readonly _supportedExtensions: ReadonlyArray<string> }
  )._supportedExtensions.includes(extension)

const send = (connection: SMTPConnection, { octets, recipients, sender }: Outgoing) =>
  Effect.callback<Handed, TransportError>((resume) => {
    // `use8BitMime` adds BODY=8BITMIME where the server offers it (RFC 6152).
    const envelope = {
      from: sender,
      to: [...recipients],
      size: octets.length,
      use8BitMime: octets.some((octet) => octet > 127)
    }
    connection.send(envelope, Buffer.from(octets), (cause, info) => {
      if (cause !== null) return resume(Effect.fail(failure("message", cause)))
      resume(
        Effect.succeed({
          reply: info!.response,
          accepted: info!.accepted,
          refused: (info!.rejectedErrors ?? []).map(({ message, recipient, response }) => ({
            recipient: recipient ?? "",
            reply: response ?? message
          }))
        })
      )
    })
  })

const failure = (operation: string, cause: SmtpError): TransportError =>
  new TransportError({
    status: statusOf(cause),
    operation,
    ...(cause.response === undefined || cause.response === "" ? {} : { reply: cause.response }),
    cause
  })

/** The server's enhanced code, else what its reply or the kind of fault amounts to. */
const statusOf = ({ code, response, responseCode }: SmtpError): Status => {
  const said = /^\d{3}[ -]([45]\.\d{1,3}\.\d{1,3})\b/.exec(response ?? "")?.[1]
  if (said !== undefined) return said as Status
  if (responseCode !== undefined) return responseCode >= 500 ? "5.0.0" : "4.0.0"
  return code === "EENVELOPE" || code === "EMESSAGE" ? "5.5.4" : "4.4.1"
}
