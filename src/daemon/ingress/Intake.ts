// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * From a message as it came in to the row it becomes, or the reply that refuses it (RFC 5321
 * section 4.4, RFC 5322). Pure.
 */
import * as Result from "effect/Result"
import * as Address from "../../mail/Address.ts"
import * as Header from "../../mail/Header.ts"
import * as Ip from "../../mail/Ip.ts"
import * as Message from "../../mail/Message.ts"
import * as Received from "../../mail/Received.ts"
import * as Smtp from "../../mail/Smtp.ts"
import type { EnvelopeParameters, State } from "../../pipeline/State.ts"
import type { Admission } from "../../services/Queue.ts"
import type { Client, Incoming } from "../../services/SmtpServer.ts"

export interface Settings {
  readonly hostname: string
  /** The section a message begins in. */
  readonly section: string
  /** Octets of the header block. */
  readonly headerBytes: number
  /** Received fields from which a message is in a loop (RFC 5321 section 6.3). */
  readonly maxHops: number
}

/** What is drawn for a message. */
export interface Drawn {
  readonly token: string
  readonly atMillis: number
}

export const toRow = (
  incoming: Incoming,
  drawn: Drawn,
  settings: Settings
): Result.Result<Admission, Smtp.Reply> => {
  const { body, header: octets } = Message.split(incoming.octets, settings.headerBytes)
  if (octets.length > settings.headerBytes) return Result.fail(headerTooLarge)
  // An mbox line in front means that a file was sent, not a message.
  if (octets.length === 0 && startsWith(body, "From ")) return Result.fail(Smtp.malformed)
  const header = Header.parse(octets)
  if (Header.count(header, "Received") >= settings.maxHops) return Result.fail(loop)
  const { client, mail, recipients } = incoming
  return Result.succeed({
    ...Message.summarize(header),
    token: drawn.token,
    sender: mail.sender === undefined ? "" : Address.format(mail.sender),
    recipients: recipients.map(Address.format),
    headers: Buffer.concat([Buffer.from(trace(incoming, drawn, settings)), octets]),
    body,
    section: settings.section,
    fairKey: fairKey(client.ip),
    state: state(client, mail)
  })
}

const headerTooLarge = Smtp.reply(552, "5.3.4", "header too large")
const loop = Smtp.reply(554, "5.4.6", "too many hops")

const startsWith = (octets: Uint8Array, text: string): boolean =>
  Buffer.from(octets.subarray(0, text.length)).toString("latin1") === text

const protocol = ({ isExtended, tls }: Client, { smtputf8 }: Smtp.Mail): string =>
  Smtp.protocol({ isExtended, isSecure: tls !== undefined, smtputf8 })

const trace = ({ client, mail, recipients }: Incoming, drawn: Drawn, settings: Settings): string =>
  Received.format({
    ...drawn,
    hostname: settings.hostname,
    helo: client.helo,
    ip: client.ip,
    tls: client.tls,
    protocol: protocol(client, mail),
    recipient: recipients.length === 1 ? Address.format(recipients[0]!) : undefined
  })

/** Who shares a turn: the network of the client, as nothing that costs more to change is known. */
export const fairKey = (ip: string): string => {
  const octets = Ip.parse(ip)
  return `n:${octets === undefined ? "unknown" : Ip.neighbourhood(octets)}`
}

const state = (client: Client, mail: Smtp.Mail): State => {
  const { helo, ip, listener, port, tls } = client
  const env: EnvelopeParameters = {
    ...(mail.body === undefined ? {} : { body: mail.body }),
    ...(mail.smtputf8 ? { smtputf8: true } : {})
  }
  return {
    local_origin: false,
    client: {
      ip,
      port,
      helo: Message.clean(helo),
      ...(tls === undefined ? {} : { tls }),
      proto: protocol(client, mail),
      listener
    },
    ...(Object.keys(env).length === 0 ? {} : { env })
  }
}
